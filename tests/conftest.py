"""Set before anything imports grpc: its C core would log every connection that a test breaks."""

import os

os.environ.setdefault("GRPC_VERBOSITY", "NONE")
