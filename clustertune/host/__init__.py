"""What one machine is and has, read without changing anything."""
