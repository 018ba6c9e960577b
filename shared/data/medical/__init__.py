"""Files of hospitals (``promptfed[medical]``): DICOM. Its libraries are imported by use alone.

Child processes (`promptfed.shared.data.readers`) read the files, with bounds on memory and time. Of headers only
keyed ids stay, in an index that later starts read (`index`).
"""
