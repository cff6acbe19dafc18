"""A job whose roles are processes of their own: what they are made from, where they go, who watches them."""
