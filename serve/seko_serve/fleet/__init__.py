"""Many servers (boxes) behind one address. Ray Serve starts and watches the boxes, gateways choose a box for each new
session, and a directory records which box has which session.
"""
