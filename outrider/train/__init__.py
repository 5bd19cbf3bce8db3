"""Training drafters: data from the target itself, one loop; each loss stands beside its drafter."""
