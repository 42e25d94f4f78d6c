"""Live video: sessions whose frames a viewer watches and steers, and jobs that make a file."""
