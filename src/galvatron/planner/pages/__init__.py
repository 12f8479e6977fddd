"""Pages to look at: a plan, a comparison, a run, each as one HTML file that needs no network."""
