"""Memory of the process, and memory that processes of one machine have in common."""
