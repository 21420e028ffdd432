"""Parts of bench_attention.py: what is timed, on which inputs, how, behind which gate, and how it is reported."""
