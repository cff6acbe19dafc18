"""Dense replicas, Hogwild workers and trainers."""
