"""One contestant of `python -m benchmark speed` that is not ours, measured in this process, with its own libraries:
python speed_peers.py NAME --warmup W --iterations I [--cleanrl PATH]

The last line it prints is JSON: steps and seconds of the I iterations after W of warm-up, versions, and for TRL the
share of the seconds spent on sampling. Runs in an environment with speed_requirements.txt, so it imports nothing from
this repository; the environments and `physics` need gymnasium[mujoco] alone.
"""

import argparse
import json
import platform
import runpy
import sys
import time
from importlib.metadata import distributions

ENV_ID, GAMMA, MINIBATCH_SIZE, EPOCHS = "HalfCheetah-v5", 0.99, 64, 10
NUM_ENVS, NUM_STEPS = 16, 128  # ours, CleanRL's and the bare environment's; Stable-Baselines3's own habit is below
BATCH_SIZE = NUM_ENVS * NUM_STEPS
SB3_NUM_ENVS, SB3_NUM_STEPS = 8, 256  # the same batch
PROMPTS, GENERATIONS, NEW_TOKENS = 16, 8, 16
ALPHABET = "0123456789+-=;$"  # the last one ends a completion, and pads
PACKAGES = ("torch", "numpy", "gymnasium", "mujoco", "stable-baselines3", "sbx-rl", "jax", "trl", "transformers")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("name", choices=CONTESTANTS)
    parser.add_argument("--warmup", type=int, required=True)
    parser.add_argument("--iterations", type=int, required=True)
    parser.add_argument("--cleanrl", help="CleanRL's ppo_continuous_action.py")
    args = parser.parse_args()
    marks, steps, *share = CONTESTANTS[args.name](args)
    # marks[k] is the time at the end of iteration k + 1; the warm-up needs one iteration or more
    seconds, steps = marks[-1] - marks[args.warmup - 1], steps * args.iterations
    assert len(marks) == args.warmup + args.iterations
    versions = {"python": platform.python_version()}
    installed = {d.name.replace("_", "-"): d.version for d in distributions()}
    versions |= {name: installed[name] for name in PACKAGES if name in installed}
    result = {"steps": steps, "seconds": seconds, "sampling_share": share[0] if share else None, "versions": versions}
    print(json.dumps(result), flush=True)


def environment(args, vector_env="SyncVectorEnv"):
    """gymnasium's vector environment with random actions: what is left if learning costs nothing."""
    import gymnasium as gym
    import numpy as np

    envs = getattr(gym.vector, vector_env)([lambda: gym.make(ENV_ID)] * NUM_ENVS)
    envs.reset(seed=1)
    rng, marks = np.random.default_rng(1), []
    for _ in range(args.warmup + args.iterations):
        actions = rng.uniform(-1, 1, (NUM_STEPS, *envs.action_space.shape)).astype(np.float32)
        for action in actions:
            envs.step(action)
        marks.append(time.perf_counter())
    return marks, BATCH_SIZE


def async_environment(args):
    """The same with a process per environment, on all cores."""
    return environment(args, "AsyncVectorEnv")


def physics(args):
    """MuJoCo alone with random controls, as many of its steps per step as the environment takes."""
    import gymnasium as gym
    import mujoco
    import numpy as np

    env = gym.make(ENV_ID).unwrapped
    model, data, rng, marks, steps = env.model, env.data, np.random.default_rng(1), [], 0
    for _ in range(args.warmup + args.iterations):
        for control in rng.uniform(-1, 1, (BATCH_SIZE, model.nu)):
            data.ctrl[:] = control
            mujoco.mj_step(model, data, nstep=env.frame_skip)
            steps += 1
            if steps % 1000 == 0:  # an episode
                mujoco.mj_resetData(model, data)
        marks.append(time.perf_counter())
    return marks, BATCH_SIZE


def sb3(args):
    import torch
    from stable_baselines3 import PPO

    torch.set_num_threads(1)
    return learn(PPO, {"device": "cpu"}, args)


def sbx(args):
    import jax
    from sbx import PPO

    return learn(PPO, {}, args, finish=lambda model: jax.block_until_ready(model.policy.actor_state.params))


def learn(PPO, settings, args, finish=lambda model: None):
    """Stable-Baselines3's PPO, or one with its interface; observations and rewards normalised, as usual for MuJoCo."""
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize

    marks = []

    class Marks(BaseCallback):
        def _on_rollout_start(self):  # the last iteration ended
            marks.append(time.perf_counter())

        def _on_training_end(self):
            finish(self.model)
            marks.append(time.perf_counter())

        def _on_step(self):
            return True

    envs = VecNormalize(make_vec_env(ENV_ID, SB3_NUM_ENVS, seed=1, vec_env_cls=DummyVecEnv), gamma=GAMMA)
    settings |= {"n_steps": SB3_NUM_STEPS, "batch_size": MINIBATCH_SIZE, "n_epochs": EPOCHS, "gamma": GAMMA}
    model = PPO("MlpPolicy", envs, policy_kwargs={"net_arch": [64, 64]}, seed=1, **settings)
    model.learn(BATCH_SIZE * (args.warmup + args.iterations), callback=Marks())
    return marks[1:], BATCH_SIZE  # the first one is the start


def cleanrl(args):
    """CleanRL's file as it is, by its own flags; what gymnasium has changed since is bridged in this process."""
    import gymnasium as gym
    import torch
    from torch.utils.tensorboard import SummaryWriter

    torch.set_num_threads(1)
    marks, add_scalar, TransformObservation = [], SummaryWriter.add_scalar, gym.wrappers.TransformObservation

    def marking(self, tag, *more, **settings):
        add_scalar(self, tag, *more, **settings)
        if tag == "charts/SPS":  # the last thing of an iteration
            marks.append(time.perf_counter())

    def transform(env, func):  # observation_space has become an argument that must be given
        return TransformObservation(env, func, env.observation_space)

    SummaryWriter.add_scalar, gym.wrappers.TransformObservation = marking, transform
    flags = {"env-id": ENV_ID, "num-envs": NUM_ENVS, "num-steps": NUM_STEPS, "update-epochs": EPOCHS, "gamma": GAMMA}
    flags |= {"num-minibatches": BATCH_SIZE // MINIBATCH_SIZE}
    flags |= {"total-timesteps": BATCH_SIZE * (args.warmup + args.iterations)}
    sys.argv = [args.cleanrl, "--no-cuda", *(word for flag, x in flags.items() for word in (f"--{flag}", str(x)))]
    runpy.run_path(args.cleanrl, run_name="__main__")
    return marks, BATCH_SIZE


def trl(args):
    """TRL's GRPOTrainer on a random Llama of our GPT's size and on our arithmetic, one gradient step per batch."""
    import random
    import re

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

    rng, problems, steps = random.Random(1), [], args.warmup + args.iterations
    for _ in range(PROMPTS * steps):
        terms = "".join(rng.choice("+-") + str(rng.randrange(10)) for _ in range(5))[1:]
        answer = sum(int(term) for term in re.findall(r"[+-]?\d", terms))
        problems.append({"prompt": f"{terms}=", "answer": str(answer)})

    def reward(completions, answer, **_):
        numbers = [re.findall(r"-?\d+", completion)[-1:] for completion in completions]
        return [float(number == [expected]) for number, expected in zip(numbers, answer, strict=True)]

    marks, sampling = [], []

    class Marks(TrainerCallback):
        def on_step_end(self, *_, **__):
            marks.append(time.perf_counter())

    class Trainer(GRPOTrainer):
        def _generate_and_score_completions(self, inputs):
            start = time.perf_counter()
            batch = super()._generate_and_score_completions(inputs)
            sampling.append(time.perf_counter() - start)
            return batch

    config = GRPOConfig(
        output_dir="trl",
        max_steps=steps,
        per_device_train_batch_size=PROMPTS * GENERATIONS,
        num_generations=GENERATIONS,
        max_completion_length=NEW_TOKENS,
        learning_rate=1e-5,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,  # it saves memory for time
        save_strategy="no",
        eval_strategy="no",
        report_to="none",
        disable_tqdm=True,
        logging_steps=10**9,
    )
    Trainer(model, reward, config, Dataset.from_list(problems), processing_class=tokenizer, callbacks=[Marks()]).train()
    share = sum(sampling[args.warmup :]) / (marks[-1] - marks[args.warmup - 1])
    return marks, PROMPTS * GENERATIONS, share


CONTESTANTS = {f.__name__: f for f in (environment, async_environment, physics, sb3, sbx, cleanrl, trl)}

if __name__ == "__main__":
    main()
