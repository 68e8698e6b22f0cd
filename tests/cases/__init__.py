"""Public failure cases, restated and run: one test module per group (A to J), its cases under their ids.

Each case gives the address of the public report that it restates. `not_here` lists those that cannot run here, with
the reason; pytest prints a tally at the end.
"""
