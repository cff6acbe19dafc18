"""Replica methods, which merge the trainers' dense replicas, and schedules, which say when."""
