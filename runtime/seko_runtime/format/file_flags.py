"""How a file is opened for reading that somebody else may have put in its place."""

import os

# No link is followed, and a pipe or a device does not block the thread that opens it.
FILE_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
