"""All tables of shapes, those first whose kernels are most intricate."""

from attention_shapes import ATTENTION
from chain_shapes import CHAIN_SHAPES
from gemm_shapes import EPILOGUES
from product_shapes import FLOAT32
from product_shapes import GATED
from product_shapes import LOSSES
from product_shapes import SHARED_INPUT
from row_shapes import ROW_SHAPES

GROUPS = ("EPILOGUES", "ATTENTION", "ROW_SHAPES", "GATED", "CHAIN_SHAPES", "SHARED_INPUT", "LOSSES", "FLOAT32")
SHAPES = (*EPILOGUES, *ATTENTION, *ROW_SHAPES, *GATED, *CHAIN_SHAPES, *SHARED_INPUT, *LOSSES, *FLOAT32)
