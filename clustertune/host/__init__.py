"""What one machine is and has, read without changing anything. Standard library only, Python 3.8 or later."""
