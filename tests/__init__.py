"""Tests. A package, so that the bodies that ranks run can be imported by name.

unit/        one file per subject, one process, seconds in all
reasons/     jobs that really make each value, in one process: the reason, its sentence, the line
properties/  what hypothesis draws: a fault at any place of any module tree or training loop, a dump changed anywhere
ranks/       real processes: wrappers, verdict, dumps, replays, teardown; `test_matrix` crosses them with faults
cases/       public failure reports, restated
e2e/         the demo, the example and the fire drill, under torchrun
device/      devices other than the CPU: two simulated ones, and a real GPU where there is one

What they share: `rank_processes` starts ranks, `training` trains (one loop for all), `models`, `faults` and `matrix`
say what is trained and what goes bad, `diagnosing` trains into a fault and explains its dump in one process,
`replaying` replays in fresh processes, `counting` counts collectives and host reads, `dump_requests` makes dumps
without training.
"""
