"""What every part of the package uses: arguments, ownership, cleaning up, bytes of others."""
