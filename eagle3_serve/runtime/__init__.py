"""What runs inside SGLang's processes, imported by the patched files.

Standard library, torch and safetensors only; importing it takes milliseconds and does nothing.
"""
