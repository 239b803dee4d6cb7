"""Pre-training of Gemma 4 on a device mesh: `python -m train --help`."""
