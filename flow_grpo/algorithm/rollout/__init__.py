"""From noise to scored samples."""
