"""Shows operators a bus: builds its digests, serves the page that draws them, and logs browsers in."""
