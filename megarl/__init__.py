"""megarl: reinforcement-learning post-training of large language models, native to Megatron-Core."""

import warnings

__version__ = "0.1.0"

# At import Megatron names each optional package that it goes without; what is used is said once in our own log.
warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\.core")
