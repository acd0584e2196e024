"""Compare the scripts seed by seed: `python -m benchmark run SUITE --out DIR`, `python -m benchmark report DIR`.

Each module imports only from those before it: suites (what is run, as data), stats (pure functions of arrays), runs
(one run: command, folder, record), runner (starts runs, here or on Slurm), results (results.csv, one row per run, the
input of all statistics), pictures, report (tables, comparisons), references (0 and 1 of normalised scores), speed
(how fast the scripts are beside others, which peers.py runs).
"""
