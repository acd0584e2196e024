"""One contestant of `python -m benchmark speed` that is not ours, measured in this process, with its own libraries:
python peers.py NAME WARMUP ITERATIONS [CLEANRL]

The last line it prints is JSON: steps and seconds of the iterations after the warm-up, versions, and for TRL the share
of the seconds spent on sampling. Runs in an environment with speed_requirements.txt, so it imports nothing from this
repository; the environments and `physics` need gymnasium[mujoco] alone.
"""

import json
import platform
import random
import re
import runpy
import sys
import time
from importlib.metadata import distributions

ENV_ID, GAMMA, MINIBATCH_SIZE, EPOCHS = "HalfCheetah-v5", 0.99, 64, 10
NUM_ENVS, NUM_STEPS, BATCH_SIZE = 16, 128, 2048  # ours and CleanRL's; Stable-Baselines3's own habit is 8 x 256
PROMPTS, GENERATIONS, NEW_TOKENS = 16, 8, 16
ALPHABET = "0123456789+-=;$"  # the last one ends a completion, and pads
PACKAGES = ("torch", "numpy", "gymnasium", "mujoco", "stable_baselines3", "sbx-rl", "jax", "trl", "transformers")


def main(name, warmup, measured, *cleanrl):
    marks, warmup, measured = [], int(warmup), int(measured)
    more = globals()[name](warmup + measured, lambda: marks.append(time.perf_counter()), *cleanrl)
    seconds = marks[-1] - marks[-1 - measured]  # a mark is the time at the end of an iteration
    share = sum(more[warmup:]) / seconds if name == "trl" else None
    steps = measured * (PROMPTS * GENERATIONS if name == "trl" else BATCH_SIZE)
    versions = {d.name: d.version for d in distributions() if d.name in PACKAGES}
    result = {"steps": steps, "seconds": seconds, "sampling_share": share}
    print(json.dumps(result | {"versions": {"python": platform.python_version()} | versions}))


def environment(iterations, mark, vector_env="SyncVectorEnv"):
    """gymnasium's vector environment with random actions: what is left if learning costs nothing."""
    import gymnasium as gym
    import numpy as np

    envs = getattr(gym.vector, vector_env)([lambda: gym.make(ENV_ID)] * NUM_ENVS)
    envs.reset(seed=1)
    rng = np.random.default_rng(1)
    for _ in range(iterations):
        for action in rng.uniform(-1, 1, (NUM_STEPS, *envs.action_space.shape)).astype(np.float32):
            envs.step(action)
        mark()


def async_environment(iterations, mark):
    """The same with a process per environment, on all cores."""
    environment(iterations, mark, "AsyncVectorEnv")


def physics(iterations, mark):
    """MuJoCo alone with random controls, as many of its steps per step as the environment takes."""
    import gymnasium as gym
    import mujoco
    import numpy as np

    env, rng, steps = gym.make(ENV_ID).unwrapped, np.random.default_rng(1), 0
    for _ in range(iterations):
        for control in rng.uniform(-1, 1, (BATCH_SIZE, env.model.nu)):
            env.data.ctrl[:] = control
            mujoco.mj_step(env.model, env.data, nstep=env.frame_skip)
            steps += 1
            if steps % 1000 == 0:  # an episode
                mujoco.mj_resetData(env.model, env.data)
        mark()


def sb3(iterations, mark):
    import torch
    from stable_baselines3 import PPO

    torch.set_num_threads(1)
    learn(PPO, iterations, mark, device="cpu")


def sbx(iterations, mark):
    import jax
    from sbx import PPO

    learn(PPO, iterations, mark, finish=lambda model: jax.block_until_ready(model.policy.actor_state.params))


def learn(PPO, iterations, mark, finish=lambda model: None, **settings):
    """Stable-Baselines3's PPO, or one with its interface; observations and rewards normalised, as usual for MuJoCo."""
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize

    class Marks(BaseCallback):
        def _on_rollout_start(self):  # the last iteration ended
            mark()

        def _on_training_end(self):
            finish(self.model)
            mark()

        def _on_step(self):
            return True

    envs = VecNormalize(make_vec_env(ENV_ID, 8, seed=1, vec_env_cls=DummyVecEnv), gamma=GAMMA)
    settings |= {"n_steps": 256, "batch_size": MINIBATCH_SIZE, "n_epochs": EPOCHS, "gamma": GAMMA}
    model = PPO("MlpPolicy", envs, policy_kwargs={"net_arch": [64, 64]}, seed=1, **settings)
    model.learn(BATCH_SIZE * iterations, callback=Marks())


def cleanrl(iterations, mark, path):
    """CleanRL's file as it is, by its own flags; what gymnasium has changed since is bridged in this process."""
    import gymnasium as gym
    import torch
    from torch.utils.tensorboard import SummaryWriter

    torch.set_num_threads(1)
    add_scalar, TransformObservation = SummaryWriter.add_scalar, gym.wrappers.TransformObservation

    def marking(self, tag, *more, **settings):
        add_scalar(self, tag, *more, **settings)
        if tag == "charts/SPS":  # the last thing of an iteration
            mark()

    def transform(env, func):  # observation_space has become an argument that must be given
        return TransformObservation(env, func, env.observation_space)

    SummaryWriter.add_scalar, gym.wrappers.TransformObservation = marking, transform
    flags = {"env-id": ENV_ID, "num-envs": NUM_ENVS, "num-steps": NUM_STEPS, "update-epochs": EPOCHS, "gamma": GAMMA}
    flags |= {"num-minibatches": BATCH_SIZE // MINIBATCH_SIZE, "total-timesteps": BATCH_SIZE * iterations}
    sys.argv = [path, "--no-cuda", *(word for flag, x in flags.items() for word in (f"--{flag}", str(x)))]
    runpy.run_path(path, run_name="__main__")


def trl(iterations, mark):
    """TRL's GRPOTrainer on a random Llama of our GPT's size and on our arithmetic, one gradient step per batch. Returns
    the seconds of sampling of each iteration."""
    import torch
    from datasets import Dataset
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(1)
    torch.manual_seed(1)
    characters = Tokenizer(models.WordLevel({c: i for i, c in enumerate(ALPHABET)}, unk_token=ALPHABET[-1]))
    characters.pre_tokenizer, characters.decoder = pre_tokenizers.Split(Regex("."), "isolated"), decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=characters, eos_token="$", pad_token="$", padding_side="left")
    size = {"hidden_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 256}
    ids = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(ALPHABET), max_position_embeddings=64, **size, **ids))

    rng, problems, sampling = random.Random(1), [], []
    for _ in range(PROMPTS * iterations):
        terms = "".join(rng.choice("+-") + str(rng.randrange(10)) for _ in range(5))[1:]
        answer = sum(int(term) for term in re.findall(r"[+-]?\d", terms))
        problems.append({"prompt": f"{terms}=", "answer": str(answer)})

    def reward(completions, answer, **_):
        numbers = [re.findall(r"-?\d+", completion)[-1:] for completion in completions]
        return [float(number == [expected]) for number, expected in zip(numbers, answer, strict=True)]

    class Marks(TrainerCallback):
        def on_step_end(self, *_, **__):
            mark()

    class Trainer(GRPOTrainer):
        def _generate_and_score_completions(self, inputs):
            start = time.perf_counter()
            batch = super()._generate_and_score_completions(inputs)
            sampling.append(time.perf_counter() - start)
            return batch

    sizes = {"per_device_train_batch_size": PROMPTS * GENERATIONS, "num_generations": GENERATIONS}
    sizes |= {"max_completion_length": NEW_TOKENS, "max_steps": iterations, "learning_rate": 1e-5}
    quiet = {"save_strategy": "no", "eval_strategy": "no", "report_to": "none", "disable_tqdm": True}
    plain = {"use_cpu": True, "bf16": False, "gradient_checkpointing": False}  # that saves memory for time
    config = GRPOConfig(output_dir="trl", logging_steps=10**9, **sizes, **quiet, **plain)
    Trainer(model, reward, config, Dataset.from_list(problems), processing_class=tokenizer, callbacks=[Marks()]).train()
    return sampling


if __name__ == "__main__":
    main(*sys.argv[1:])
