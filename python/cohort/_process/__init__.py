"""This process as a rank: its default world, threads as ranks, its ends. Private."""
