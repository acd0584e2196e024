"""Compare the scripts seed by seed: `python -m benchmark run SUITE --out DIR`, `python -m benchmark report DIR`.

suites.py      what is run: algorithms x tasks x lags x seeds, as plain data
choose.py      what --only, --seeds, --set and the like make of a suite
runs.py        one run of a suite: its command, its folder, whether it is finished
runner.py      starts the runs as separate processes, resumes or repeats what is missing
slurm.py       the same as job arrays of Slurm
progress.py    how far the runs are; estimate.py how long they will take
results.py     results.csv, one row per run, the input of all statistics
scores.py      scores between a random policy and PPO without lag; reference.py measures these two
stats.py       the statistics, pure functions of arrays
tables.py      tables of a report; pictures.py its pictures; document.py Markdown and HTML; report.py puts it together
compare.py     two folders of results, run by run
speed.py       how fast the scripts are beside others: speed_peers.py runs these, speed_report.py writes the tables
"""
