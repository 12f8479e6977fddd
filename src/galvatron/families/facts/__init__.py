"""What the facts of families are counted with: operations, and blocks made of them. No torch."""
