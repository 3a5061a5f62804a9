"""Every tolerance of the test suite, with the reason beside it: `from tests.tolerances import NAME`.

A test that needs a bound which is not here adds it here, in the section of its room, and says where the number comes
from: a format's step, a count of roundings, a measurement with its margin. Exact comparisons need no entry.
"""

# -- bundle ------------------------------------------------------------------------------------------------------------

# In steps of the scale. Half a step, and the quotient's own rounding to fp16 before it is rounded to a whole number:
# its unit in the last place between 64 and 128 is 1/16, so it is off by at most 1/32.
QUANTIZE_HALF_STEP = 0.5 + 1 / 32

# -- bake --------------------------------------------------------------------------------------------------------------

# Of the largest weight of a matrix: a product over a rank of at most 16 and one sum in float32, beside peft's float32
# or our float64; DoRA's lengths of rows are one division more. Seen 3e-7.
LORA_MERGE = 1e-6
# How many of 96 x 63 weights a given part of a step moves: four standard deviations, sqrt(0.25 / 6048) each at most.
SURVIVAL = 0.026

# -- run ---------------------------------------------------------------------------------------------------------------

# Two float64 soft maxima of at most 40 entries: a few roundings of 1.1e-16 each, times the gap of at most 600 that the
# lowest temperature makes of the logits' range; 1e-12 is ten times what was seen and far below any real difference.
PROBABILITY = 1e-12
# Standard deviations by which a counted frequency may be off: for five ids and one fixed seed 4 is never by chance.
SAMPLE_SIGMAS = 4.0

ATTENTION_FP16 = 2.5e-3  # attention in fp16 beside float64: the last rounding of values up to 4 is 1e-3, seen 1.2e-3
OP_FP32 = 3e-6  # one op in float32 beside numpy's: sums of up to 70 products in another order, each step 6e-8
OP_TORCH_FP32 = 2e-5  # the same beside torch, whose convolutions of values up to 9 add up to 60
OP_FP16_ULP = 1.0  # fp16: a float32 sum in another order can fall on the other side of a half, and no further
GELU_OTHER_HALF = 1e-3  # the share of values that two float32 formulas, 1e-7 apart, round differently to fp16
STRESS_SUM = 2**-6  # a few hundred roundings of a running fp16 sum, 2^-12 each on average and of either sign
STRESS_OP = 2**-6  # one op with its inside rounded, beside the same rounded once: some 10 steps of 2^-11, and sums
OP_FP16_STEPS = 2**-8  # coremltools rounds every step inside an fp16 op: 8 steps of 2^-11 of the largest value

# The fast CPU engine beside the reference engine after 140 tokens, measured as below. Exact mode rounds nothing inside
# a package, where the reference rounds some 40 results a layer to fp16: seen 4.6e-3; of an fp32 program only ports and
# state are fp16: seen 9e-4. Fast mode computes in bfloat16, whose steps are 8 times as large: seen 1.2e-2 to 3.8e-2.
CPU_EXACT = {"fp16": 7e-3, "fp32": 2e-3}
CPU_FAST = 6e-2
# The native engine in fast mode rounds activations to 8 bits where they meet int8 matrices: seen 1.4e-2 to 3e-2.
CPU_NATIVE_FAST = 5e-2
# Exact mode beside itself, the same tokens in other chunks: float32 sums in another order, and then the other side of a
# half where states are rounded to fp16; seen 1.1e-3.
CPU_ORDER = 2e-3
# The keys and values in a state, of a spread of 1.4, against the reference engine's: seen 4.1e-3.
CPU_STATE = 7e-3

# The worst row's root mean square error of the logits, relative to their spread: the same tokens in chunks or one by
# one on the reference engine. Only float32 sums differ in order, and with them some fp16 roundings after; seen 4e-3.
CHAIN_CUT = 6e-3

# -- judge -------------------------------------------------------------------------------------------------------------

# Oracle against transformers, both float32: logits of spread 1 to 20 after three layers and 300 positions. The largest
# part is transformers' own float32 angle at position 299 (300 * 2^-24 rad).
ORACLE_LOGITS = 1e-4
# Oracle against itself, only the order of its float32 sums differs.
ORACLE_PIECES = 5e-5
# silu and gelu of |x| up to 12: a few roundings of 2^-24 of values up to 12.
ORACLE_ACTIVATION = 3e-6
# Float64 frequencies against transformers' float32 ones: a few roundings of 2^-24 each.
ORACLE_FREQUENCY = 1e-6
# The chain on the reference engine, plain and under stress, against the oracle: the worst row's root mean square error
# of the logits, relative to their spread (3 to 7 logits), for models of three layers: some 40 fp16 roundings of 2^-12 a
# layer, on top of each other; seen 9e-3. The gate's cosine of 0.999 is an error of 0.045.
CHAIN_ORACLE = 0.012
CHAIN_ORACLE_FP32 = 0.007  # float32 inside the packages; ports, states and rotations are fp16; seen 4e-3
# Quantised weights against the original ones: steps of 1/127 of the largest of 32 to 96 weights, in 21 matrices and the
# head; seen 0.077, 0.068, 0.067.
CHAIN_QUANTISED = {"int8": 0.15, "int8-block32": 0.12, "m8": 0.12}

# Greedy text on the real model: where the original's first two tokens are closer than this, either may come. fp16
# logits of 16 to 32 lie 0.0156 apart and the fp16 chain is off by about 0.02 on SmolLM2.
UNDECIDED_LOGITS = 0.05

# The oracle on dequantised weights beside llama.cpp, which rounds activations to 8 bits for every product with a
# quantised matrix, on Gemma3-270M; a wrong norm, rope or scale of the embedding is below 0.9.
LLAMA_CPP_COSINE = 0.99

# Rows of logits of one engine that are to be the same, and of two that compute the same: relative root mean square. Far
# above what fp16 does to a chain of three layers (0.01), far below what another token's logits are (0.3 and more).
CONFORMANCE = 0.05

# -- serve -------------------------------------------------------------------------------------------------------------

# Natural logarithms of probabilities of the same tokens fed in one chunk or one by one: CHAIN_CUT of logits of a spread
# of about 7 is a root mean square of 0.04, and the worst of 25 is twice that; seen 0.042.
SERVED_LOGPROB = 0.08
# Statistics in float64 by two formulas: some tens of roundings of 1.1e-16, and a quantile that both compute to 1e-12.
STATISTIC = 1e-9
# A score statistic whose likelihood was maximised numerically: the place is found to about 1e-8, seen 2e-7.
SCORE_NUMERIC = 1e-5
# A norm in fp16 against float64, relative to the row's largest result: the division, the root, two products and the
# gain round by up to 2^-11 each; seen 4e-4.
NORM_OF_ANY_ROW = 1e-3
# A row of 1e-4 is divided by the floor of 2^-10, not by its maximum, and keeps the bits it has; seen 4e-4.
NORM_OF_A_TINY_ROW = 2e-3
# Log probabilities of one token, fp16 chain of one layer beside transformers in float32, in nats: the logits are off
# by up to CHAIN_ORACLE of a spread of some 4; seen 0.01.
HARNESS_NATS = 0.05
# Square error of our palettes relative to that of scipy's k-means: both end in a local minimum.
PALETTE_COST = 1.05

# Sums over float32 products against float64 ones, of statistics with a condition number of about 1e5.
LOSS_RELATIVE = 1e-4
DRIFT_RELATIVE = 1e-3

# What 120 steps of descent reach, relative to what scipy finds with 20 000 evaluations of the same function.
BALANCE_COST = 1.05

# Logits, relative to their spread. Moving scale loses what norm gains and the producer's rows lose in fp16: 2^-12 of
# each of some hundred numbers that a result is made of.
MOVED_DEVIATION = 2e-3
# A chain in fp16 against float32 arithmetic on the same stored weights, three layers.
ENGINE_DEVIATION = 2e-2
