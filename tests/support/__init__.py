"""What the tests share: programs in fresh interpreters, interrupts, stand-ins for models."""
