"""What fits a budget: plans are priced by the memory trace before anything is trained."""
