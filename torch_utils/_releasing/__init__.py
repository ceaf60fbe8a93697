"""How `release` does it: plan, count, give up, look for who still holds, give back."""
