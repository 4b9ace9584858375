"""Who may ask, whose cache is whose, and whose turn it is: pure decisions."""
