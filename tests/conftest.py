"""What every test process begins with."""

import pytest


@pytest.fixture(scope="session", autouse=True)
def autograd_without_threads() -> None:
    """Lets autograd count the devices before torch.compile pretends that there is a GPU.

    It counts once, at a process's first backward, and starts a thread for each; a process with such threads can fork no
    rank that runs a backward of its own. Whichever test came first decided that.
    """
    import torch

    if not torch.cuda.is_available():
        torch.ones(1, requires_grad=True).sum().backward()
