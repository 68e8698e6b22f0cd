"""Public failure cases: reports of non-finite values, and of hangs caused by handling them, restated and run.

The reports are issues, pull requests and threads about PyTorch and projects that train with it. Each was restated
as a small input and what a guard must do; models and code are of this repository, never copied. A case is called
by its group and a number, as in ``A05``; the address of the report stands with the case. One module per group:

=====  ===============================================  ==================
group  what goes wrong                                  module
=====  ===============================================  ==================
A      one rank goes bad: lockstep, hangs               `test_a_lockstep`
B      mixed precision, scaling, clipping               `test_b_precision`
C      FSDP and other sharding                          `test_c_sharding`
D      the model or its loss makes the value            `test_d_model`
E      the data bring it in                             `test_e_data`
F      optimizer, running averages, checkpoints         `test_f_optimizer`
G      non-finite values that are meant                 `test_g_legitimate`
H      compiled code, recomputation, accumulation       `test_h_calls`
I      replay and reproduction                          `test_i_replay`
J      hooks, and the mechanics of looking at values    `test_j_hooks`
K      what loop, state and communication do to it      `test_k_answers`
=====  ===============================================  ==================

There are 110. Numbers are not consecutive: near-duplicates of a case were left out and the others kept their numbers.
Tests elsewhere that restate a case name it in the same way. Most cases are data (`harness.Case`), run by one
`test_case` per module on two ranks; the others are tests of their own. `not_here` lists the cases that cannot run here,
with the reason; `test_all_here` sees to it that each number is either run or listed. pytest prints a tally at the end.
"""
