"""The mathematics of group relative policy optimization: arrays in, arrays out.

Every function is written once over the Python array API and runs on NumPy (float64 is the reference), on torch tensors
under autograd, and on JAX arrays under `jit` and `grad`. Importing this package imports neither torch nor JAX.
"""

from covey.functions import from_stub

__all__, __getattr__ = from_stub(__name__, __file__)
