"""What is asked of a finished artifact: its contents, its speed, its profile."""
