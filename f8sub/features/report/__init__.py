"""What a conversion did and why it left what it left: ``conversion_report``."""
