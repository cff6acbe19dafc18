"""Starts roles, connects them and watches over them."""
