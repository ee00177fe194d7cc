"""Values passed between layers: frozen, without clock or input and output."""
