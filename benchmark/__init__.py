"""Compare the scripts seed by seed: `python -m benchmark run SUITE --out DIR`, `python -m benchmark report DIR`.

suites.py   what is run: algorithms x tasks x lags x seeds, as plain data
runs.py     one run of a suite: its command, its folder, whether it is finished
runner.py   starts the runs as separate processes and repeats what is missing
report.py   table, results.csv and picture of the finished runs
stats.py    the statistics, pure functions of arrays
speed.py    how fast the scripts are beside other implementations: speed_peers.py runs those, speed_report.py the tables
"""
