"""Our tuner against published policies, in virtual time: `python -m tests.bench policies`.

Every arm meets the same traces on the same simulated engines. The fidelity is the simulator's "by
block" (`specdecode_sim.block`): a cell, so many streams at one K, is a recording of the engine step
by step. What decides from scrapes (ours) sees those recordings under noise as Prometheus would hold
them; what decides inside the engine is given the recorded steps one after another, so it decides as
often as it would. Regret is counted in the cells' own long-run goodput, so noise moves decisions
but not the score.
"""
