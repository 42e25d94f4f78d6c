"""HTTP and sockets: routes, middleware, and the socket of a stream."""
