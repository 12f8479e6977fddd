"""One file per architecture family: its hyper-parameters, and the layers they make."""
