"""Times on one NVIDIA H200 (driver 580.159), bf16, batch 1, not causal.

torch 2.11.0+cu130, triton 3.6.0, cuDNN 9.19, flash-attn-4 4.0.0b36, nvidia-cudnn-frontend 1.32.0. Lists are random and
of equal counts.
"""

from __future__ import annotations

from megatron_dsv.kernels.timing_rows import DenseRow, SelectionRow, SparseRow

DENSE = (
    DenseRow("sdpa", 16384, 24, 128, 4.80, 14.04),
    DenseRow("sdpa", 32768, 24, 128, 21.2, 60.2),
    DenseRow("sdpa", 65536, 24, 128, 85.2, 244.1),
    DenseRow("sdpa", 262144, 2, 128, 115.2, 326.3),
    DenseRow("sdpa", 16384, 16, 64, 2.28, 5.95),
    DenseRow("sdpa", 32768, 16, 64, 8.87, 24.3),
    DenseRow("sdpa", 65536, 16, 64, 37.6, 96.0),
    DenseRow("sdpa", 131072, 8, 64, 75.5, 194.4),
    DenseRow("flash4", 16384, 24, 128, 5.13, 13.34),
    DenseRow("flash4", 32768, 24, 128, 20.2, 54.2),
    DenseRow("flash4", 65536, 24, 128, 79.2, 218.3),
    DenseRow("flash4", 262144, 2, 128, 107.5, 288.7),
    DenseRow("flash4", 65536, 16, 64, 32.3, 84.2),
    DenseRow("flash4", 131072, 8, 64, 65.5, 163.4),
)

SPARSE = (
    SparseRow("triton", 64, 64, 65536, 24, 128, 0.0996, 12.37, 33.07),
    SparseRow("triton", 128, 128, 65536, 24, 128, 0.0996, 11.28, 36.85),
    SparseRow("triton", 128, 64, 65536, 24, 128, 0.0996, 12.9, 33.9),
    SparseRow("triton", 128, 1, 65536, 24, 128, 0.0996, 14.3, 55.0),
    SparseRow("triton", 64, 1, 65536, 24, 128, 0.0996, 14.2, 104.4),
    SparseRow("flash4", 128, 128, 65536, 24, 128, 0.0996, 8.77, 26.21),
    SparseRow("cudnn", 128, 128, 65536, 24, 128, 0.0996, 13.0, 25.48),
    SparseRow("cudnn", 64, 64, 65536, 24, 128, 0.0996, 10.54, 31.56),
)

SELECTION = (
    SelectionRow(64, 64, 32768, 12, 4.4),
)
