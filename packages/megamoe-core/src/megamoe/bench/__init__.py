"""Benchmarks: what is run, how it is timed, against whom, against which roof, and how results are kept, drawn and compared.

    workloads.py  shapes per rank, token counts, routing patterns, random operands
    timing.py     device events around back-to-back launches or graph replays, contestants in turn
    roof.py       what this GPU can do at best, and the floor of a workload under it
    contestants.py  who runs: megamoe's backends, the torch pipeline, peers that are importable
    unfused.py    the layer as a torch pipeline
    points.py     one measured point after another, each checked by the oracle first
    results.py    the JSON file
    plot.py       latency against tokens, as SVG
    compare.py    two result files point by point

Importing this package loads no torch.
"""
