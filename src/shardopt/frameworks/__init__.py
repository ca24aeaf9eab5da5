"""What differs between frameworks: one adapter module each, and nothing else of the package imports a framework.

The rooms speak to tensors through tensor methods that the frameworks share. What they need beyond that is a
``Framework``, handed to them; ``shardopt.frameworks.torch`` and ``shardopt.frameworks.tensorplay`` each make one.
"""

from shardopt.frameworks.framework import Autograd, Framework
from shardopt.frameworks.join import ShadowStep, stand_last

__all__ = ["Autograd", "Framework", "ShadowStep", "stand_last"]
