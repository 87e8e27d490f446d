"""The admin API: its routes, who may use them, and their OpenAPI document."""
