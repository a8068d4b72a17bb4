"""How a draft and its trainer reach the code that publishes them, which stands above them in the package."""

from collections.abc import Callable
from types import ModuleType

# Loads `hub.repository`. Set by the package's root, so that models and training import nothing of the hub.
load: Callable[[], ModuleType]
