"""HTTP and WebSocket interface of the server: routes, middleware, and the socket of a stream."""
