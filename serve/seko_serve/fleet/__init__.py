"""Many servers behind one address: Ray Serve starts and watches them, a gateway says which one has room, and a
directory says which one has a session.
"""
