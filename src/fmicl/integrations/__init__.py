"""f-MICL inside other libraries; each module here needs the library that it is named after."""
