"""Video models behind the Policy seam."""
