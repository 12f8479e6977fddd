"""The artifact: making a plan, its file, explaining and comparing plans, showing them."""
