"""Shows operators a bus: builds its digest, serves the page that draws it, and decides who may look."""
